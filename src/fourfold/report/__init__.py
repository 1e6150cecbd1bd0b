"""Pages about runs (`run_page.write_report`) and plans (`plan_page.write_plan_page`): self-contained HTML files.

A page contains plotly.js and a content security policy that forbids every request, so it can be mailed, archived and
opened offline. plotly (extra `report`) is imported only when a page is written.
"""
