"""``python -m servelab`` is the ``servelab`` command."""

from servelab.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
