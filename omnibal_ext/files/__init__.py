"""Writing files and folders: atomically, by one program at a time, with checksums."""
