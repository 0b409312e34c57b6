"""Console entry points. Their modules import no torch until they run, so that TAB completion stays fast."""
