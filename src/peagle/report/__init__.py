"""What people look at: one page about a drafter or several, and the model card on the hub.

In: folders with evaluations, metrics, configs and manifests. Out: report.html, report.md, report.csv; a pushed
checkpoint. Always: a section is there if and only if something was measured for it.
Public: `report.report`, `hub.push`, `config.ReportConfig` and `PushConfig`.
"""
