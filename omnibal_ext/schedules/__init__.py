"""What pipeline ranks do and when.

actions.py    what an action is: F, B, W of stages, E and V of a replicated tower; lists of them
placement.py  on which rank each stage is
program.py    what every action waits for, and an order in which all can run: lists are checked here
clock.py      how time is told and bytes are counted, compiled
simulate.py   costs in; seconds, timelines, bytes out
schedule.py   the schedules by name; playing.py makes those that are played greedily, weaving.py puts E and V in
posting.py    when ranks start to receive
"""
