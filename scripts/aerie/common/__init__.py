"""What every other package uses: errors, files, versions, progress, processes."""
