{{/*
Computes the layout from the values, as JSON: the accelerator's preset, hosts per replica, accelerators
per host and the layout of ranks. Fails and names the value if values are inconsistent.
*/}}
{{- define "weft.plan" -}}
{{- $type := .Values.accelerator.type -}}
{{- $presets := .Files.Get "files/accelerators.yaml" | fromYaml -}}
{{- $preset := get $presets $type -}}
{{- if hasKey .Values.accelerator.types $type -}}
  {{- $own := get .Values.accelerator.types $type -}}
  {{- $like := get $presets (default "gpu" $own.like) -}}
  {{- if not $like -}}
    {{- fail (printf "accelerator.types.%s.like is %q; it must be one of %s" $type $own.like (keys $presets | sortAlpha | join ", ")) -}}
  {{- end -}}
  {{- $preset = deepCopy $like -}}
  {{- range $field, $value := omit $own "like" }}{{ $preset = set $preset $field $value }}{{ end -}}
{{- end -}}
{{- if not $preset -}}
  {{- fail (printf "accelerator.type is %q; it must be a key of accelerator.types or one of %s" $type (keys $presets | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if and .Values.accelerator.resource (eq $preset.kind "cpu") -}}
  {{- fail (printf "accelerator.resource is %q; accelerator.type cpu has no accelerators: leave it out" .Values.accelerator.resource) -}}
{{- end -}}
{{- with .Values.accelerator.resource }}{{ $preset = set (deepCopy $preset) "resource" . }}{{ end -}}
{{- $hosts := 1 -}}
{{- $perHost := 0 -}}
{{- $devices := 0 -}}
{{- if eq $preset.kind "tpu" -}}
  {{- $topology := .Values.accelerator.topology -}}
  {{- $sizes := get $preset.slices $topology -}}
  {{- if not $sizes -}}
    {{- fail (printf "accelerator.topology is %q; with accelerator.type %s it must be one of %s" $topology $type (keys $preset.slices | sortAlpha | join ", ")) -}}
  {{- end -}}
  {{- $perHost = int (default (first $sizes) .Values.accelerator.perHost) -}}
  {{- $known := false -}}
  {{- range $sizes }}{{ if eq (int .) $perHost }}{{ $known = true }}{{ end }}{{ end -}}
  {{- if not $known -}}
    {{- fail (printf "accelerator.perHost is %d; with accelerator.topology %s it must be one of %s" $perHost $topology (join ", " $sizes)) -}}
  {{- end -}}
  {{- $chips := 1 -}}
  {{- range splitList "x" $topology }}{{ $chips = mul $chips (int .) }}{{ end -}}
  {{- $hosts = div $chips $perHost -}}
  {{- if and .Values.hosts (ne (int .Values.hosts) (int $hosts)) -}}
    {{- fail (printf "hosts is %d; a slice of %s has %d hosts of %d chips each: leave hosts out" (int .Values.hosts) $topology $hosts $perHost) -}}
  {{- end -}}
  {{- $devices = mul $chips (int $preset.devices) -}}
{{- else -}}
  {{- if .Values.accelerator.topology -}}
    {{- fail (printf "accelerator.topology is %q; accelerator.type %s has no topology: leave it out" .Values.accelerator.topology $type) -}}
  {{- end -}}
  {{- $hosts = int (default 1 .Values.hosts) -}}
  {{- if eq $preset.kind "cuda" -}}
    {{- $perHost = int (default 1 .Values.accelerator.perHost) -}}
    {{- $devices = mul $hosts $perHost -}}
  {{- else if .Values.accelerator.perHost -}}
    {{- fail (printf "accelerator.perHost is %d; accelerator.type cpu has no accelerators: leave it out" (int .Values.accelerator.perHost)) -}}
  {{- end -}}
{{- end -}}

{{- $p := .Values.parallelism -}}
{{- $dp := int (default 1 $p.dp) -}}
{{- $cp := int (default 1 $p.cp) -}}
{{- $ep := int (default 1 $p.ep) -}}
{{- $tp := int (default 0 $p.tp) -}}
{{- $pp := int (default 0 $p.pp) -}}
{{- if and (eq $preset.kind "tpu") (or (gt $cp 1) (gt $pp 1)) -}}
  {{- fail (printf "parallelism.cp is %d and parallelism.pp %d; on TPUs both must be 1: use parallelism.tp" $cp (max 1 $pp)) -}}
{{- end -}}
{{- $all := int (default $hosts $devices) -}}{{/* CPUs take any number of ranks */}}
{{- if not $pp -}}
  {{- $pp = 1 -}}
  {{- if and (eq $preset.kind "cuda") $tp -}}
    {{- $pp = max 1 (div $all (mul $dp (max (mul $tp $cp) $ep))) -}}
  {{- else if eq $preset.kind "cuda" -}}
    {{- $pp = max 1 (div $hosts $dp) -}}
  {{- end -}}
{{- end -}}
{{- if not $tp }}{{ $tp = max 1 (div $all (mul $dp $pp $cp)) }}{{ end -}}
{{- $ranks := mul $dp $pp (max (mul $tp $cp) $ep) -}}
{{- $layout := printf "parallelism (dp %d, pp %d, tp %d, cp %d, ep %d) makes %d ranks" $dp $pp $tp $cp $ep $ranks -}}
{{- if and $devices (ne (int $ranks) (int $devices)) -}}
  {{- fail (printf "%s; a replica has %d hosts with %d devices in all: use all of them" $layout (int $hosts) (int $devices)) -}}
{{- else if lt (int $ranks) (int $hosts) -}}
  {{- fail (printf "%s; hosts is %d: each host needs at least one rank" $layout (int $hosts)) -}}
{{- end -}}
{{- if and (gt (int $hosts) 1) (not .Values.nodeToken.existingSecret) -}}
  {{- fail (printf "nodeToken.existingSecret is empty; the %d hosts of a replica need a shared token: kubectl create secret generic NAME --from-literal=token=..." (int $hosts)) -}}
{{- end -}}
{{- dict "preset" $preset "hosts" (int $hosts) "perHost" $perHost "layout" (dict "tp" (int $tp) "ep" $ep "cp" $cp "pp" (int $pp) "dp" $dp) | toJson -}}
{{- end -}}

{{/* The model's location, as JSON: weft's argument, the volume, and the Hugging Face repository to download. */}}
{{- define "weft.model" -}}
{{- $path := .Values.model.path -}}
{{- $model := dict "argument" $path -}}
{{- if hasPrefix "pvc://" $path -}}
  {{- $parts := regexSplit "/" (trimPrefix "pvc://" $path) 2 -}}
  {{- $volume := dict "persistentVolumeClaim" (dict "claimName" (first $parts) "readOnly" true) -}}
  {{- $model = dict "argument" (printf "/models/%s" (join "/" (rest $parts)) | trimSuffix "/") "volume" $volume "readOnly" true "mountPath" "/models" -}}
{{- else if hasPrefix "hostpath://" $path -}}
  {{- $host := trimPrefix "hostpath://" $path | trimSuffix "/" -}}
  {{- $at := printf "/models/%s" (base $host) -}}
  {{- $volume := dict "hostPath" (dict "path" $host "type" "Directory") -}}
  {{- $model = dict "argument" $at "volume" $volume "readOnly" true "mountPath" $at -}}
{{- else if regexMatch "^(hf://)?[^/@:]+/[^/@]+(@[^/@]+)?$" $path -}}
  {{- $parts := splitList "@" (trimPrefix "hf://" $path) -}}
  {{- $volume := dict "emptyDir" dict -}}
  {{- with .Values.model.cache -}}
    {{- if .existingClaim }}{{ $volume = dict "persistentVolumeClaim" (dict "claimName" .existingClaim) -}}
    {{- else if .hostPath }}{{ $volume = dict "hostPath" (dict "path" .hostPath "type" "Directory") -}}
    {{- else if .sizeLimit }}{{ $volume = dict "emptyDir" (dict "sizeLimit" .sizeLimit) }}{{ end -}}
  {{- end -}}
  {{- $model = dict "argument" (printf "/models/%s" (first $parts)) "volume" $volume "readOnly" false "mountPath" "/models" "repository" (first $parts) "revision" (join "" (rest $parts)) -}}
{{- end -}}
{{- $model | toJson -}}
{{- end -}}

{{/* Requests and limits. Kubernetes requires both to be equal for accelerators. */}}
{{- define "weft.resources" -}}
{{- $plan := include "weft.plan" . | fromJson -}}
{{- $count := max 1 (int $plan.perHost) -}}
{{- $defaults := dict "cpu" (mul $count (int $plan.preset.cpu) | toString) "memory" (printf "%dGi" (mul $count (int $plan.preset.memory))) -}}
{{- $limits := merge dict (default dict .Values.resources.limits) -}}
{{/* Default requests do not exceed their limits. */}}
{{- $requests := merge dict (default dict .Values.resources.requests) $limits $defaults -}}
{{/* On CPUs weft takes a share of the pod's memory limit; without a limit it would use the node's memory. */}}
{{- if eq $plan.preset.kind "cpu" }}{{ $limits = merge $limits (pick $requests "memory") }}{{ end -}}
{{- if $plan.perHost -}}
{{- $accelerators := dict $plan.preset.resource (toString $plan.perHost) -}}
{{- $requests = mergeOverwrite $requests $accelerators -}}
{{- $limits = mergeOverwrite $limits $accelerators -}}
{{- end -}}
{{- dict "requests" $requests "limits" $limits | toYaml -}}
{{- end -}}
