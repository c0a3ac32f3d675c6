"""What commands are given: options, files, and streams."""
