{{- define "weft.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Never changed by an upgrade: a Deployment's selector cannot be. */}}
{{- define "weft.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "weft.labels" -}}
{{ include "weft.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of the pods that clients reach: a replica's only one, or its leader. */}}
{{- define "weft.serverSelector" -}}
{{ include "weft.selector" . }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "weft.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "weft.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What is scaled. The LeaderWorkerSet has another name than the Service: its controller makes a
     headless Service of its own name, in which pods find each other before they are ready. */}}
{{- define "weft.workload" -}}
{{- $plan := include "weft.plan" . | fromJson -}}
{{- if gt (int $plan.hosts) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
name: {{ include "weft.fullname" . }}-hosts
{{- else -}}
apiVersion: apps/v1
kind: Deployment
name: {{ include "weft.fullname" . }}
{{- end -}}
{{- end -}}

{{/* A Job's pods cannot be changed: others are another Job, which takes the place of the one before. */}}
{{- define "weft.batchName" -}}
{{- include "weft.fullname" . }}-batch-{{ include "weft.batchPod" . | fromYaml | toJson | sha256sum | trunc 8 }}
{{- end -}}
