{{/* Names and labels of all templates. */}}

{{- define "holdfast.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "holdfast.fullname" -}}
{{- $name := include "holdfast.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.operator" -}}
{{- include "holdfast.fullname" . }}-operator
{{- end -}}

{{- define "holdfast.agents" -}}
{{- include "holdfast.fullname" . }}-agents
{{- end -}}

{{- define "holdfast.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "holdfast.operator" . -}}
{{- else -}}
{{- fail "serviceAccount.name: got nothing; expected the name of a service account, as serviceAccount.create is false" -}}
{{- end -}}
{{- end -}}

{{/* Cluster-scoped names contain the namespace, for releases of the same name in one cluster. */}}
{{- define "holdfast.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "holdfast.fullname" .) -}}
{{- end -}}

{{/* Label selector of the namespaces that this release watches; of all without watchNamespaces. */}}
{{- define "holdfast.watchedNamespaces" -}}
{{- if .Values.watchNamespaces -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: In
    values: {{- toYaml .Values.watchNamespaces | nindent 6 }}
{{- else -}}
matchLabels: {}
{{- end -}}
{{- end -}}

{{/* Namespaces without jobs, as a list of CEL. A release may watch its own by name. */}}
{{- define "holdfast.systemNamespaces" -}}
{{- $own := list .Release.Namespace -}}
{{- if has .Release.Namespace .Values.watchNamespaces }}{{ $own = list }}{{ end -}}
{{- concat (list "kube-system" "kube-public" "kube-node-lease") $own | toJson | replace "\"" "'" -}}
{{- end -}}

{{- define "holdfast.selectorLabels" -}}
app.kubernetes.io/name: {{ include "holdfast.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "holdfast.labels" -}}
{{ include "holdfast.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: holdfast
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Settings that the restricted pod security standard requires. */}}
{{- define "holdfast.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end -}}

{{- define "holdfast.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsUser }}
fsGroup: {{ .Values.runAsUser }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "holdfast.priorityClass" -}}
{{- if .Values.priorityClassName -}}
{{- .Values.priorityClassName -}}
{{- else if .Values.priorityClass.create -}}
{{- include "holdfast.clusterName" . }}-operator
{{- end -}}
{{- end -}}

{{- define "holdfast.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "holdfast.workerImage" -}}
{{- .Values.worker.image | default (printf "registry.invalid/holdfast/worker:%s" .Chart.AppVersion) -}}
{{- end -}}
