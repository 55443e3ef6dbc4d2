"""What goes wrong with a model that somebody hands in."""


class FrontendError(ValueError):
    """A model that cannot be read or traced. One line: what is wrong, where, and what to do about it."""


class UnsafeModelWarning(UserWarning):
    """Reading this model runs code from its file, as the caller allowed."""


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's text, or its type when it has none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
