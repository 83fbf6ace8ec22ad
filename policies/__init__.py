"""Who may do what with a voice, and the proof of what was done."""
