"""The command line: click commands, rendering, progress, and exit codes. Library users do not need it."""
