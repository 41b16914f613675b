"""The rollout log on disk: the columns of its episode records, and how it is written and read."""
