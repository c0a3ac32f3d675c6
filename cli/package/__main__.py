"""Entry point of `python -m headrace`, for systems where the installed script is not on the path."""

from headrace.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
