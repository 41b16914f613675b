"""Options of a run: described once, checked by one table of rules, with their defaults."""
