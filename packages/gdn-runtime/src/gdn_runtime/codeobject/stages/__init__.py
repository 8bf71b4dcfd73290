"""The stages of the block as launches of AMD code objects: spec -> kernel -> launch, one module per stage."""
