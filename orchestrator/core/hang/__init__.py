"""Hangs: facts of the ranks -> the first row of the table that holds -> its limit -> suspects."""
