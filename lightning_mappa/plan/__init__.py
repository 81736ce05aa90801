"""`mappa plan`: what a run will need, worked out before anything is started or any weight is loaded."""
