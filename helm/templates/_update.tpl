{{/* How an upgrade replaces replicas. Fails if an upgrade could never finish. */}}
{{- define "weft.updateStrategy" -}}
{{- with .Values.updateStrategy -}}
{{- $surges := toString .maxSurge | trimSuffix "%" | int -}}
{{- if not (or $surges (toString .maxUnavailable | trimSuffix "%" | int)) -}}
  {{- fail "updateStrategy.maxSurge and updateStrategy.maxUnavailable are both 0, so no replica could ever be replaced: set one of them to 1" -}}
{{- end -}}
{{- if $.Values.settings.state_dir -}}
  {{- $scales := ne $.Values.autoscaling.kind "none" -}}
  {{- $copies := int (ternary $.Values.autoscaling.maxReplicas $.Values.replicas $scales) -}}
  {{- if gt $copies 1 -}}
    {{- fail (printf "settings.state_dir is set and %s is %d; only one server at a time can use the folder: set it to 1, or leave settings.state_dir out" (ternary "autoscaling.maxReplicas" "replicas" $scales) $copies) -}}
  {{- end -}}
  {{- $plan := include "weft.plan" $ | fromJson -}}
  {{- if and $surges (gt (int $plan.hosts) 1) -}}{{/* a Deployment with it uses Recreate */}}
    {{- fail (printf "settings.state_dir is set and updateStrategy.maxSurge is %v; only one server at a time can use the folder, so an additional replica would wait forever: set updateStrategy.maxSurge=0 and updateStrategy.maxUnavailable=1" .maxSurge) -}}
  {{- end -}}
{{- end -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}
