"""What is wrong with a task."""


class TaskError(ValueError):
    """One sentence that names the file, the field and what is allowed."""
