"""Files and folders that we write: whole or not at all, appended to, by one program at a time, checked."""
