"""The attention of models whose sequences are in pieces: on several processes, or one after the other."""
