{{- define "weft.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* An upgrade must not change these: a Deployment's selector is immutable. */}}
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

{{/* Selects the pods with the API: a replica's only pod, or its leader. */}}
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

{{/* The workload to scale. The LeaderWorkerSet's name differs from the Service's, because its controller
     creates a headless Service with its own name. There pods find each other before they are ready. */}}
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

{{/* A Job's pod is immutable, so a different pod gets a different Job, which replaces the old one. */}}
{{- define "weft.batchName" -}}
{{- include "weft.fullname" . }}-batch-{{ include "weft.batchPod" . | fromYaml | toJson | sha256sum | trunc 8 }}
{{- end -}}
