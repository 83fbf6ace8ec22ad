"""Two HSM sites that prove to each other what they hold: statements, rules and certificates, without any I/O."""
