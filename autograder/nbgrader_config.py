"""Read by nbgrader at the repository's root, through the nbgrader_config.py there. The settings are in settings.py."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from autograder.settings import configure

configure(get_config())  # type: ignore[name-defined]  # noqa: F821
