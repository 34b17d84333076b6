"""Pictures of timelines and bubble accounts. Matplotlib is imported when one is drawn."""

from roundpipe.plot.pictures import plot_account, plot_overlay, plot_timeline, save_picture

__all__ = ["plot_account", "plot_overlay", "plot_timeline", "save_picture"]
