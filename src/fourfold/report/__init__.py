"""Pages about a run: `write_report(run)` makes one self-contained HTML file of a run folder.

The page holds plotly.js itself and a content security policy that forbids every request, so it can be mailed,
archived and opened offline. plotly (extra `report`) is imported when a page is written, not before.
"""

from fourfold.report.page import write_report

__all__ = ["write_report"]
