{{/*
What the operator may do in the namespaces of jobs. docs/operations/security.md explains each rule,
and a test compares the two. The operator gets Secrets by name; it cannot list or watch them.
*/}}
{{- define "holdfast.jobRules" -}}
- apiGroups: ["holdfast.dev"]
  resources: ["trainingjobs"]
  verbs: ["get", "list", "watch", "patch", "delete"]
- apiGroups: ["holdfast.dev"]
  resources: ["trainingjobs/status"]
  verbs: ["get", "patch"]
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["get", "list", "watch", "create", "patch", "delete"]
- apiGroups: [""]
  resources: ["configmaps"]
  verbs: ["get", "create", "update"]
- apiGroups: [""]
  resources: ["secrets"]
  verbs: ["get", "create"]
- apiGroups: [""]
  resources: ["events"]
  verbs: ["list", "create", "patch"]
{{- range .Values.rbac.gangs }}
{{- if eq . "kueue" }}
- apiGroups: ["kueue.x-k8s.io"]
  resources: ["localqueues"]
  verbs: ["list"]
{{- else }}
- apiGroups: ["scheduling.k8s.io"]
  resources: ["podgroups"]
  verbs: ["create", "patch", "delete"]
{{- end }}
{{- end }}
{{- end -}}

{{/* Topology labels, taints and GPUs of nodes, which are cluster-scoped. */}}
{{- define "holdfast.nodeRules" -}}
- apiGroups: [""]
  resources: ["nodes"]
  verbs: ["get", "list"]
{{- end -}}
