"""Pages about runs and plans: `write_report(run)` makes one self-contained HTML file from a run folder.

A page contains plotly.js and a content security policy that forbids every request, so it can be mailed, archived and
opened offline. plotly (extra `report`) is imported only when a page is written.
"""

from fourfold.report.run_page import write_report

__all__ = ["write_report"]
