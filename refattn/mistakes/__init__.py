"""The ways people get a mechanism wrong, as edits of its definition."""
