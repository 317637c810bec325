"""What an engine says about its steps, to the status of its rank and to DeepSpeed's monitor."""
