{{- /* Labels of an object: (dict "component" NAME). Selectors have the first two alone. */ -}}
{{- define "kvik.selector" -}}
app.kubernetes.io/name: kvik
app.kubernetes.io/component: {{ .component }}
{{- end -}}
{{- define "kvik.labels" -}}
app.kubernetes.io/name: kvik
{{- if .component }}
app.kubernetes.io/component: {{ .component }}
{{- end }}
app.kubernetes.io/part-of: kvik
{{- end -}}

{{- define "kvik.metadata" -}}
name: {{ .name | default (printf "kvik-%s" .component) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "kvik.labels" . | nindent 2 }}
{{- end -}}

{{- define "kvik.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* The account and the configuration of a role: one section of kvik.yaml, or several (dict "sections" (dict NAME CONFIG)). */ -}}
{{- define "kvik.account-and-config" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "kvik.metadata" . | nindent 2 }}
automountServiceAccountToken: false
---
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "kvik.metadata" . | nindent 2 }}
data:
  kvik.yaml: |
    {{- toYaml (.sections | default (dict .component .role.config)) | nindent 4 }}
{{- end -}}

{{- /* What all pods have: user, account, where they run. */ -}}
{{- define "kvik.pod" -}}
serviceAccountName: kvik-{{ .component }}
automountServiceAccountToken: {{ .automount | default false }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .role.terminationGracePeriodSeconds }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  fsGroup: 65532
  runAsGroup: 65532
  runAsNonRoot: true
  runAsUser: 65532
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "kvik.spread" -}}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kvik.selector" $ | nindent 8 }}
  {{- end }}
{{- end -}}

{{- define "kvik.container-security" -}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop:
      - ALL
  readOnlyRootFilesystem: true
{{- end -}}

{{- /* The service's port, its probes and its resources: (dict "port" N "ready" PATH). */ -}}
{{- define "kvik.probes" -}}
livenessProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
readinessProbe:
  httpGet:
    path: {{ .ready | default "/ready" }}
    port: http
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{- define "kvik.token-variables" -}}
- name: KVIK_CLUSTER_TOKEN_FILE
  value: /run/secrets/kvik/cluster
- name: KVIK_ADMIN_TOKEN_FILE
  value: /run/secrets/kvik/admin
{{- end -}}

{{- define "kvik.pod-name-variable" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end -}}

{{- define "kvik.mounts" -}}
- name: config
  mountPath: /etc/kvik
  readOnly: true
- name: tokens
  mountPath: /run/secrets/kvik
  readOnly: true
{{- end -}}

{{- /* (dict "tokens" (list NAMES)) */ -}}
{{- define "kvik.volumes" -}}
- name: config
  configMap:
    name: kvik-{{ .component }}
- name: tokens
  secret:
    secretName: {{ .root.Values.tokens.secretName }}
    defaultMode: 0440
    items:
      {{- range .tokens }}
      - key: {{ . }}
        path: {{ . }}
      {{- end }}
{{- end -}}

{{- /* The port at the end of an address such as 0.0.0.0:8080. */ -}}
{{- define "kvik.port" -}}
{{ regexFind "[0-9]+$" . }}
{{- end -}}

{{- /* Peers of a network policy: pods of roles. */ -}}
{{- define "kvik.peers" -}}
{{- range . }}
- podSelector:
    matchLabels:
      {{- include "kvik.selector" (dict "component" .) | nindent 6 }}
{{- end }}
{{- end -}}
{{- define "kvik.ports" -}}
ports:
  {{- range . }}
  - port: {{ . }}
    protocol: TCP
  {{- end }}
{{- end -}}
