load_subconfig("autograder/nbgrader_config.py")  # noqa: F821  (nbgrader run at this folder is the course's grader)
