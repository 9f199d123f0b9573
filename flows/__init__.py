"""What a person runs or schedules."""
