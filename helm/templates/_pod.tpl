{{/* Engine flags for both serve and batch, as a YAML list. */}}
{{- define "weft.engineArgs" -}}
{{- $plan := include "weft.plan" . | fromJson -}}
- --device={{ $plan.preset.kind }}
- --backend={{ ternary "jax" "torch" (eq $plan.preset.kind "tpu") }}
{{- range $name := list "tp" "ep" "cp" "pp" "dp" }}
{{- with int (get $plan.layout $name) }}
{{- if gt . 1 }}
- --{{ $name }}={{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq $plan.preset.kind "cpu") (not .Values.settings.threads) }}
{{- $resources := include "weft.resources" . | fromYaml }}
{{- /* The kernel reports all the node's cores to a pod. More threads than the pod's cores are slow. */}}
- --threads={{ include "weft.cores" (default $resources.requests.cpu $resources.limits.cpu) }}
{{- end }}
{{- end -}}

{{/* A quantity such as 4, "4" or 2500m, rounded down to whole cores; at least 1. */}}
{{- define "weft.cores" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}
{{- max 1 (div (trimSuffix "m" $text | int) 1000) -}}
{{- else -}}
{{- max 1 (float64 $text | floor | int) -}}
{{- end -}}
{{- end -}}

{{/* Weft settings as flags. */}}
{{- define "weft.settings" -}}
{{- range $name, $value := . }}
{{- $flag := $name | replace "_" "-" }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $flag }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $flag $value | quote }}
{{- else if not (kindIs "invalid" $value) }}
- --{{ $flag }}={{ toJson $value }}{{/* a large number would be printed as 1e+06 */}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "weft.image" -}}
{{- $plan := include "weft.plan" . | fromJson -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default (printf "%s-%s" $.Chart.AppVersion $plan.preset.image) .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Grace period in seconds: the wait for load balancers, the time for running requests, and 20 more.
     In these, clients read their last answers (5, serving/api/http.py) and all processes end. */}}
{{- define "weft.gracePeriod" -}}
{{- add .Values.drain.preStopSeconds .Values.drain.timeoutSeconds 20 -}}
{{- end -}}

{{/* Common fields of all weft containers. */}}
{{- define "weft.container" -}}
{{- $plan := include "weft.plan" . | fromJson -}}
{{- $model := include "weft.model" . | fromJson -}}
image: {{ include "weft.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{- toYaml .Values.securityContext | nindent 2 }}
resources: {{- include "weft.resources" . | nindent 2 }}
env:
  - {name: HOME, value: /cache}
  {{- if gt (int $plan.hosts) 1 }}
  {{- if .Values.compileCache.existingClaim }}
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  {{- end }}
  - name: WEFT_NODE_TOKEN
    valueFrom:
      secretKeyRef: {name: {{ .Values.nodeToken.existingSecret | quote }}, key: {{ .Values.nodeToken.key | quote }}}
  {{- end }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  - name: cache
    mountPath: /cache
    {{- if and (gt (int $plan.hosts) 1) .Values.compileCache.existingClaim }}
    subPathExpr: $(POD_NAME)  # a separate compile cache per node
    {{- end }}
  {{- if $model.volume }}
  - {name: models, mountPath: {{ $model.mountPath | quote }}, readOnly: true}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Common fields of all weft pods, except containers. */}}
{{- define "weft.pod" -}}
{{- $plan := include "weft.plan" . | fromJson -}}
{{- $model := include "weft.model" . | fromJson -}}
serviceAccountName: {{ include "weft.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false  # else a Service called weft sets WEFT_PORT, which is a setting
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- $labels := get (default dict $plan.preset.nodes) .Values.accelerator.nodeLabels | default dict }}
{{- if and (eq $plan.preset.kind "tpu") $labels }}
{{- $labels = merge $labels (dict "cloud.google.com/gke-tpu-topology" .Values.accelerator.topology) }}
{{- end }}
{{- with merge dict .Values.nodeSelector $labels }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or $plan.preset.resource .Values.tolerations }}
tolerations:
  {{- with $plan.preset.resource }}
  - {key: {{ . }}, operator: Exists, effect: NoSchedule}
  {{- end }}
  {{- with .Values.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- if $model.repository }}
initContainers:
  - name: download
    image: {{ include "weft.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [hf, download]
    args:
      - {{ $model.repository | quote }}
      {{- with $model.revision }}
      - {{ printf "--revision=%s" . | quote }}
      {{- end }}
      - {{ printf "--local-dir=%s" $model.argument | quote }}
    securityContext: {{- toYaml .Values.securityContext | nindent 6 }}
    resources:
      requests: {cpu: "1", memory: 2Gi}
      limits: {memory: 8Gi}
    env:
      - {name: HOME, value: /tmp}
      {{- with .Values.model.huggingFaceToken }}
      {{- if .existingSecret }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .key | quote }}}
      {{- end }}
      {{- end }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: models, mountPath: /models}
{{- end }}
volumes:
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir:
      medium: Memory
      {{- with .Values.sharedMemory.sizeLimit }}
      sizeLimit: {{ . }}
      {{- end }}
  - name: cache
    {{- with .Values.compileCache }}
    {{- if .existingClaim }}
    persistentVolumeClaim: {claimName: {{ .existingClaim }}}
    {{- else if .hostPath }}
    hostPath: {path: {{ .hostPath | quote }}, type: Directory}
    {{- else }}
    emptyDir: {}
    {{- end }}
    {{- end }}
  {{- with $model.volume }}
  - name: models
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Pod metadata. The argument is (list . COMPONENT). */}}
{{- define "weft.podMetadata" -}}
{{- $component := last . -}}
{{- with first . -}}
labels:
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "weft.selector" . | nindent 2 }}
  app.kubernetes.io/component: {{ $component }}
{{- with .Values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The pod with the API: a replica's only pod, or its leader. */}}
{{- define "weft.serverPod" -}}
{{- $plan := include "weft.plan" . | fromJson -}}
{{- $model := include "weft.model" . | fromJson -}}
metadata: {{- include "weft.podMetadata" (list . "server") | nindent 2 }}
spec:
  terminationGracePeriodSeconds: {{ include "weft.gracePeriod" . }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $selector := dict "matchLabels" (include "weft.serverSelector" $ | fromYaml) }}
    - {{- toYaml (set (deepCopy .) "labelSelector" (default $selector .labelSelector)) | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- $pod := include "weft.pod" . | fromYaml }}
  {{- with .Values.apiKeys.existingSecret }}
  {{- $volume := dict "name" "api-keys" "secret" (dict "secretName" .) }}
  {{- $_ := set $pod "volumes" (append $pod.volumes $volume) }}
  {{- end }}
  {{- toYaml $pod | nindent 2 }}
  containers:
    - name: weft
      command: [weft]
      args:
        - serve
        - {{ $model.argument | quote }}
        - --host=0.0.0.0
        - --port=8000
        - --drain-timeout={{ .Values.drain.timeoutSeconds }}
        {{- with .Values.model.name }}
        - {{ printf "--served-model-name=%s" . | quote }}
        {{- end }}
        {{- include "weft.engineArgs" . | trim | nindent 8 }}
        {{- if gt (int $plan.hosts) 1 }}
        - --nodes={{ $plan.hosts }}
        - --node-port=7333
        {{- end }}
        {{- if .Values.apiKeys.existingSecret }}
        - {{ printf "--api-key-file=/etc/weft/%s" .Values.apiKeys.key | quote }}
        {{- end }}
        {{- if or .Values.metrics.serviceMonitor.enabled .Values.inferencePool.enabled (ne .Values.autoscaling.kind "none") }}
        - --open-metrics{{/* scrapers have no API key */}}
        {{- end }}
        {{- if and .Values.inferencePool.enabled (not (hasKey .Values.settings "vllm_metrics")) }}
        - --vllm-metrics{{/* endpoint pickers look for vLLM's names */}}
        {{- end }}
        {{- include "weft.settings" .Values.settings | trim | nindent 8 }}
      ports:
        - {name: http, containerPort: 8000}
        {{- if gt (int $plan.hosts) 1 }}
        - {name: join, containerPort: 7333}
        {{- end }}
      startupProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml .Values.probes.startup | nindent 8 }}
      readinessProbe:
        httpGet: {path: /ready, port: http}
        {{- toYaml .Values.probes.readiness | nindent 8 }}
      livenessProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml .Values.probes.liveness | nindent 8 }}
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ .Values.drain.preStopSeconds | toString | quote }}]}
      {{- $container := include "weft.container" . | fromYaml }}
      {{- if .Values.apiKeys.existingSecret }}
      {{- $mount := dict "name" "api-keys" "mountPath" "/etc/weft" "readOnly" true }}
      {{- $_ := set $container "volumeMounts" (append $container.volumeMounts $mount) }}
      {{- end }}
      {{- toYaml $container | nindent 6 }}
{{- end -}}
