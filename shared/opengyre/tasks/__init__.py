"""Tasks as others keep them: Harbor directories, Terminal-Bench 1 directories, Dockerfiles, reward files, test reports.

Nothing here runs anything; only `opengyre.tasks.directory` reads files.
"""
