"""The demo: a small task, a teacher and a student, made from nothing in two minutes."""
