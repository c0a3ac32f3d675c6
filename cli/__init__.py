"""The command line: click commands, rendering, progress and exit codes, and nothing a library user would miss."""
