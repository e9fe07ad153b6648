"""servelab: what a notebook of the course imports."""

__version__ = "0.1.0"
