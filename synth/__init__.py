"""Text and an opened voice into sound."""
