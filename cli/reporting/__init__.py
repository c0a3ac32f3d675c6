"""What commands print: results, progress, errors, and exit codes."""
