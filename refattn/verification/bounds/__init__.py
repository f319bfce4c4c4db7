"""How far rounding alone may take each array from the truth."""
