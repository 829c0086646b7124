"""What a section does in TRL and in verl, through one fixture: a drift that was closed stays closed."""
