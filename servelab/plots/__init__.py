"""The course's pictures: one style (`servelab.plots.style`), one module for each kind of picture."""
