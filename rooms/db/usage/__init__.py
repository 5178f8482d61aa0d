"""Count usage from the log (`count`), and read what was counted (`read`)."""
