"""Videos, as frames that an encoder of their own sees one by one."""
