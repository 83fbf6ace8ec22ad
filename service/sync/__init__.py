"""The site process: hsm-sync/1 with the other site, the operator's commands, and what runs by itself."""
