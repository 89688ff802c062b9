"""Offline programs, one verb each; installed as the package `omnibal_tools` and run by the command `omnibal`."""
