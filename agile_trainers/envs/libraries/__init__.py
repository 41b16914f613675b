"""Environments of other libraries, one file each. A file is imported when an id names its library."""
