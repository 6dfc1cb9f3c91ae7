{{/* Names and labels. */}}
{{- define "blink.name" -}}
{{- if contains "blink" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-blink" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "blink.selector" -}}
app.kubernetes.io/name: blink
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "blink.labels" -}}
{{ include "blink.selector" . }}
app.kubernetes.io/part-of: blink
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "blink.image" -}}
{{- $image := .image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}{{ else }}{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Nothing runs as root, writes to its root file system or gains rights. */}}
{{- define "blink.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "blink.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Settings as the variables that processes read. */}}
{{- define "blink.settings" -}}
{{- $process := .process -}}
{{- range $name, $value := .settings }}
{{- /* Helm's numbers are floats, whose text for a million is 1e+06. */}}
{{- $whole := and (kindIs "float64" $value) (eq (toString $value) (toString (floor $value))) }}
- {name: {{ printf "BLINK_%s_%s" $process (upper $name) }}, value: {{ ternary (int64 $value | toString) (toString $value) $whole | quote }}}
{{- end }}
{{- end }}

{{- define "blink.commonEnvironment" -}}
- {name: BLINK_RUNTIME_DIR, value: /run/blink/own}
- {name: BLINK_MODEL_DIR, value: /models}
- {name: HOME, value: /tmp}
{{- end }}

{{/* Devices that serving asks for, by the names of their resources: as the keys of a map. */}}
{{- define "blink.devices" -}}
{{- $found := dict }}
{{- range $part := list .Values.engine .Values.gateway }}
{{- range $asked := list $part.resources.requests $part.resources.limits (dict $part.rdmaResource 1) }}
{{- range $name, $_ := $asked }}
{{- if contains "/" $name }}{{ $_ := set $found $name true }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- toYaml $found }}
{{- end }}

{{/* Gateway workers that the engine has room for: over verbs all have one certificate. Defaults are those of `blink engine`. */}}
{{- define "blink.lanes" -}}
{{- $lanes := .Values.engine.settings.lanes | default 4 | int -}}
{{- if eq .Values.transport "verbs" }}{{ min $lanes (.Values.engine.settings.lanes_per_certificate | default 16 | int) }}{{ else }}{{ $lanes }}{{ end }}
{{- end }}
