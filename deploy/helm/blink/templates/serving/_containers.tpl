{{/* The engine's container. */}}
{{- define "blink.engineContainer" -}}
{{- $v := .Values -}}
name: engine
image: {{ include "blink.image" (dict "root" . "image" $v.images.engine) }}
imagePullPolicy: {{ $v.images.pullPolicy }}
args: [engine]
env:
  {{- include "blink.commonEnvironment" . | nindent 2 }}
  - {name: BLINK_BOOTSTRAP_MODEL, value: {{ $v.model.name | quote }}}
  - {name: BLINK_BOOTSTRAP_ENGINE, value: {{ $v.engine.kind }}}
  - {name: BLINK_BOOTSTRAP_TRANSPORT, value: {{ $v.transport }}}
  {{- if not (hasKey $v.engine.settings "drain_seconds") }}
  - {name: BLINK_BOOTSTRAP_DRAIN_SECONDS, value: {{ $v.gateway.drainSeconds | quote }}}
  {{- end }}
  {{- if eq $v.transport "verbs" }}
  - {name: BLINK_BOOTSTRAP_LISTEN, value: "0.0.0.0:{{ $v.engine.handshakePort }}"}
  - {name: BLINK_BOOTSTRAP_HANDSHAKE_CERTIFICATE, value: /handshake/tls.crt}
  - {name: BLINK_BOOTSTRAP_HANDSHAKE_KEY, value: /handshake/tls.key}
  - {name: BLINK_BOOTSTRAP_HANDSHAKE_AUTHORITY, value: /handshake/ca.crt}
  {{- end }}
  {{- include "blink.settings" (dict "process" "BOOTSTRAP" "settings" $v.engine.settings) | nindent 2 }}
{{- if eq $v.transport "verbs" }}
ports:
  - {name: handshake, containerPort: {{ $v.engine.handshakePort }}}
{{- end }}
{{- /* Loading a large model takes minutes. */}}
startupProbe:
  {{- include "blink.engineProbe" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 20
  failureThreshold: 360
{{- /* Each look starts a process, and the host's CPU is not to be used. */}}
livenessProbe:
  {{- include "blink.engineProbe" . | nindent 2 }}
  periodSeconds: 30
  timeoutSeconds: 20
  failureThreshold: 2
  {{- /* What stands still drains nothing. */}}
  terminationGracePeriodSeconds: 5
readinessProbe:
  {{- include "blink.engineProbe" . | nindent 2 }}
  periodSeconds: 30
  timeoutSeconds: 20
resources:
  {{- $resources := deepCopy $v.engine.resources }}
  {{- if $v.engine.rdmaResource }}
  {{- $_ := set $resources "limits" (merge (dict $v.engine.rdmaResource 1) ($resources.limits | default dict)) }}
  {{- $_ := set $resources "requests" (merge (dict $v.engine.rdmaResource 1) ($resources.requests | default dict)) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
securityContext:
  {{- if eq $v.transport "verbs" }}
  {{- /* Registered memory is locked memory. */}}
  allowPrivilegeEscalation: false
  privileged: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities: {drop: [ALL], add: [IPC_LOCK]}
  {{- else }}
  {{- include "blink.containerSecurity" . | nindent 2 }}
  {{- end }}
volumeMounts:
  - {name: models, mountPath: /models, readOnly: true}
  - {name: shm, mountPath: /dev/shm}
  - {name: run, mountPath: /run/blink}
  - {name: tmp, mountPath: /tmp}
  {{- if eq $v.transport "verbs" }}
  - {name: handshake, mountPath: /handshake, readOnly: true}
  {{- end }}
{{- end }}

{{/* Heartbeat and progress, out of the ring itself: bootstrap is asked, which reaches it wherever it lies. Where gateways are told
to have more patience with a step, so has it. */}}
{{- define "blink.engineProbe" -}}
exec: {command: [python, -m, services.bootstrap.probe, {{ max 120 (int (ceil (.Values.gateway.settings.progress_timeout | default 0))) | quote }}]}
{{- end }}

{{/* Fetches the model, unless it is there. */}}
{{- define "blink.modelContainer" -}}
name: model
image: {{ include "blink.image" (dict "root" . "image" .Values.images.engine) }}
imagePullPolicy: {{ .Values.images.pullPolicy }}
args: [model, pull, {{ .Values.model.name | quote }}]
env:
  {{- include "blink.commonEnvironment" . | nindent 2 }}
  {{- with .Values.model.indexURL }}
  - {name: PIP_INDEX_URL, value: {{ . | quote }}}
  {{- end }}
resources:
  requests: {cpu: 100m, memory: 256Mi}
  limits: {memory: 512Mi}
securityContext:
  {{- include "blink.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: models, mountPath: /models}
  - {name: run, mountPath: /run/blink}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* One gateway worker; all of a pod share its ports but the one at which each is asked for its health. Takes root and worker. */}}
{{- define "blink.gatewayContainer" -}}
{{- $v := .root.Values -}}
{{- $health := add 8100 .worker -}}
name: gateway-{{ .worker }}
image: {{ include "blink.image" (dict "root" .root "image" $v.images.gateway) }}
imagePullPolicy: {{ $v.images.pullPolicy }}
args: [gateway]
env:
  {{- include "blink.commonEnvironment" .root | nindent 2 }}
  - {name: BLINK_GATEWAY_WORKER, value: {{ .worker | quote }}}
  - {name: BLINK_GATEWAY_LISTEN, value: "0.0.0.0:50051"}
  - {name: BLINK_GATEWAY_HTTP_LISTEN, value: "0.0.0.0:8000"}
  - {name: BLINK_GATEWAY_HEALTH_LISTEN, value: "0.0.0.0:{{ $health }}"}
  - {name: BLINK_GATEWAY_TRANSPORT, value: {{ $v.transport }}}
  - {name: BLINK_GATEWAY_DRAIN_LIMIT, value: {{ $v.gateway.drainSeconds | quote }}}
  {{- if eq $v.transport "verbs" }}
  - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
  - {name: BLINK_GATEWAY_GATEWAY_ID, value: "$(NODE_NAME)/{{ include "blink.name" .root }}/{{ .worker }}"}
  - {name: BLINK_GATEWAY_BOOTSTRAP, value: "{{ include "blink.name" .root }}-engine.{{ .root.Release.Namespace }}.svc:{{ $v.engine.handshakePort }}"}
  - {name: BLINK_GATEWAY_HANDSHAKE_CERTIFICATE, value: /handshake/tls.crt}
  - {name: BLINK_GATEWAY_HANDSHAKE_KEY, value: /handshake/tls.key}
  - {name: BLINK_GATEWAY_HANDSHAKE_AUTHORITY, value: /handshake/ca.crt}
  {{- end }}
  {{- include "blink.settings" (dict "process" "GATEWAY" "settings" $v.gateway.settings) | nindent 2 }}
ports:
  {{- if eq (int .worker) 0 }}
  - {name: grpc, containerPort: 50051}
  - {name: http, containerPort: 8000}
  {{- end }}
  - {name: health-{{ .worker }}, containerPort: {{ $health }}}
startupProbe:
  httpGet: {path: /health, port: health-{{ .worker }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
{{- /* The process itself; that its engine is away is no reason to end it. */}}
livenessProbe:
  httpGet: {path: /health, port: health-{{ .worker }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
  terminationGracePeriodSeconds: 10
{{- /* Heartbeat and progress of the engine. */}}
readinessProbe:
  httpGet: {path: /ready, port: health-{{ .worker }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
lifecycle:
  preStop:
    {{- /* Endpoints forget the pod before it stops to take requests; then SIGTERM drains for drainSeconds. */}}
    sleep: {seconds: 5}
resources:
  {{- $resources := deepCopy $v.gateway.resources }}
  {{- /* A device plugin gives devices to the container that asks, not to its pod. */}}
  {{- if $v.gateway.rdmaResource }}
  {{- $_ := set $resources "limits" (merge (dict $v.gateway.rdmaResource 1) ($resources.limits | default dict)) }}
  {{- $_ := set $resources "requests" (merge (dict $v.gateway.rdmaResource 1) ($resources.requests | default dict)) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
securityContext:
  {{- if eq $v.transport "verbs" }}
  allowPrivilegeEscalation: false
  privileged: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities: {drop: [ALL], add: [IPC_LOCK]}
  {{- else }}
  {{- include "blink.containerSecurity" .root | nindent 2 }}
  {{- end }}
volumeMounts:
  - {name: run, mountPath: /run/blink}
  - {name: tmp, mountPath: /tmp}
  {{- if eq $v.transport "verbs" }}
  - {name: handshake, mountPath: /handshake, readOnly: true}
  {{- else }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
{{- end }}

{{/* What all pods that serve have in common. Takes root, part, and engine or gateway values. */}}
{{- define "blink.podCommon" -}}
{{- $v := .root.Values -}}
serviceAccountName: {{ include "blink.name" .root }}-serving
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $v.images.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- if $v.priorityClasses.create }}
priorityClassName: {{ include "blink.name" .root }}-serving
{{- end }}
terminationGracePeriodSeconds: {{ add $v.gateway.drainSeconds 15 }}
securityContext:
  {{- include "blink.podSecurity" .root | nindent 2 }}
{{- with .part.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "blink.engineVolumes" -}}
- name: models
  {{- toYaml (.Values.model.volume | default (dict "emptyDir" (dict "sizeLimit" "4Gi"))) | nindent 2 }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .Values.engine.shmSize }}}}
- {name: run, emptyDir: {medium: Memory, sizeLimit: 16Mi}}
- {name: tmp, emptyDir: {sizeLimit: 1Gi}}
{{- end }}
