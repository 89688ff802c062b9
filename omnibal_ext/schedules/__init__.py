"""What pipeline ranks do and when.

actions.py    what an action is: F, B, W of stages, E and V of a replicated tower; lists of them
placement.py  on which rank each stage is
program.py    what every action waits for, an order in which all can run, when receives are posted; lists are checked
clock.py      compiled loops: start and end of actions, bytes held
simulate.py   costs in; seconds, timelines, bytes out
schedule.py   the schedules by name; playing.py builds zero-bubble ones, weaving.py adds E and V
"""
