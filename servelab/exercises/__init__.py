"""The exercises of every unit: challenges, drivers and judges. See `servelab.exercise`."""
