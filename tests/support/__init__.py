"""What several tests share: stand-ins, tiny models, projects in a folder of their own."""
