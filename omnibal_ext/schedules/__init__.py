"""What pipeline ranks do and when: lists of actions, where stages sit, what schedules cost in time and memory."""
